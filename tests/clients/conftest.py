"""One scripted server with room for an agent's prompt, for all clients."""

from collections.abc import Iterator

import pytest

from tests.serve.model_dir import write_model_files
from tests.serve.running import Running, options, running

CALL = (
    "plan</think><tool_call>add<arg_key>a</arg_key><arg_value>2</arg_value>"
    "<arg_key>b</arg_key><arg_value>3</arg_value></tool_call>"
)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_model_files(tmp_path_factory.mktemp("clients") / "tiny")
    with running(options(folder, max_model_len=1 << 19)) as found:
        yield found
