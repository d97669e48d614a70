"""Settings: order of sources, origins, refusals with the nearest name, and what resolve decides."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oxplow.config import (
    CacheConfig,
    ComputeConfig,
    Facts,
    KernelPreference,
    LoadedConfig,
    LogConfig,
    ResolvedConfig,
    RuntimeConfig,
    TraceConfig,
    load_config,
    resolve,
)
from oxplow.errors import ConfigError

RECORDS = (
    CacheConfig, ComputeConfig, Facts, KernelPreference, LogConfig, ResolvedConfig, RuntimeConfig,
    TraceConfig,
)  # fmt: skip


def load(
    text: str | None = None,
    env: dict[str, str] | None = None,
    overrides: dict[str, object] | None = None,
    *,
    folder: Path | None = None,
) -> LoadedConfig:
    path = None
    if text is not None:
        assert folder is not None
        path = folder / "oxplow.toml"
        path.write_text(text)
    return load_config(path, overrides, env or {}, override_origin="--set")


def origin(loaded: LoadedConfig, key: str) -> str:
    return next(s.origin for s in loaded.settings if s.key == key)


@pytest.mark.parametrize("record", RECORDS)
def test_record_is_frozen_slotted_and_small(record: type) -> None:
    assert dataclasses.is_dataclass(record)
    assert record.__dataclass_params__.frozen
    assert "__slots__" in vars(record)
    assert len(dataclasses.fields(record)) <= 12


def test_defaults_need_no_file_and_no_variable() -> None:
    loaded = load()
    assert loaded.runtime == RuntimeConfig()
    assert {s.origin for s in loaded.settings} == {"default"}


def test_every_field_is_listed_with_its_variable_and_effect() -> None:
    settings = {s.key: s for s in load().settings}
    sections = dataclasses.fields(RuntimeConfig)
    names = {
        f"{section.name}.{f.name}"
        for section in sections
        if section.name != "kernels"
        for f in dataclasses.fields(getattr(RuntimeConfig(), section.name))
    }
    assert settings.keys() == names
    assert all(s.doc and s.env.startswith("OXPLOW_") for s in settings.values())


def test_later_source_wins_and_is_named(tmp_path: Path) -> None:
    text = "[compute]\nthreads = 1\ndevice = 'cpu'\n[log]\nlevel = 'debug'\n[trace]\n"
    env = {"OXPLOW_COMPUTE_THREADS": "2", "OXPLOW_COMPUTE_DEVICE": "cuda:0"}
    loaded = load(text, env, {"compute.threads": 3}, folder=tmp_path)
    assert loaded.runtime.compute == ComputeConfig(threads=3, device="cuda:0")
    assert loaded.runtime.log.level == "debug"
    assert origin(loaded, "compute.threads") == "--set"
    assert origin(loaded, "compute.device") == "env OXPLOW_COMPUTE_DEVICE"
    assert origin(loaded, "log.level") == f"file {tmp_path / 'oxplow.toml'}"
    assert origin(loaded, "log.file") == "default"


def test_config_variable_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[cache]\nblock_size_tokens = 16\n")
    loaded = load_config(environ={"OXPLOW_CONFIG": str(path)})
    assert loaded.runtime.cache.block_size_tokens == 16


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXPLOW_COMPUTE_THREADS", "5")
    assert load_config().runtime.compute.threads == 5


def test_empty_variable_and_absent_override_count_as_not_given() -> None:
    loaded = load(env={"OXPLOW_COMPUTE_THREADS": ""}, overrides={"compute.device": None})
    assert loaded.runtime == RuntimeConfig()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("Yes", True), ("on", True), ("0", False), ("FALSE", False)],
)
def test_truth_is_read_from_text(text: str, value: bool) -> None:
    loaded = load(env={"OXPLOW_COMPUTE_DETERMINISTIC": text})
    assert loaded.runtime.compute.deterministic is value


def test_kernel_wishes_come_from_every_source(tmp_path: Path) -> None:
    loaded = load(
        "[kernels]\nkda_prefill = 'torch'\nrms_norm = 'torch'\n",
        {"OXPLOW_KERNELS_KDA_PREFILL": "triton"},
        {"kernels.linear": "vendor"},
        folder=tmp_path,
    )
    wishes = {"kda_prefill": "triton", "linear": "vendor", "rms_norm": "torch"}
    assert loaded.runtime.preferred_kernels() == wishes
    assert origin(loaded, "kernels.kda_prefill") == "env OXPLOW_KERNELS_KDA_PREFILL"


@pytest.mark.parametrize(
    ("text", "env", "overrides", "said"),
    [
        ("[compute]\ndevise = 'cpu'", {}, {}, "compute.devise; wanted compute.device, the nearest"),
        ("[chache]\nblock_size_tokens = 4", {}, {}, "wanted cache.block_size_tokens, the nearest"),
        ("threads = 3", {}, {}, "got threads; wanted a table, one of compute, cache"),
        ("[kernels]\n'' = 'x'", {}, {}, "got kernels.;"),
        ("[compute", {}, {}, "is not TOML"),
        (None, {"OXPLOW_COMPUTE_THREAD": "1"}, {}, "wanted OXPLOW_COMPUTE_THREADS, the nearest"),
        (None, {}, {"compute.thread": 1}, "wanted compute.threads, the nearest name (at --set)"),
        (None, {}, {"qqqqqqqq": 1}, "wanted one of cache.block_size_tokens, "),
        ("[compute]\nthreads = '2.5'", {}, {}, "compute.threads has the wrong type; got '2.5'"),
        ("[compute]\nthreads = true", {}, {}, "wanted a whole number"),
        ("[compute]\nthreads = 2.0", {}, {}, "wanted a whole number"),
        ("[compute]\ndeterministic = 1", {}, {}, "wanted true or false"),
        ("[compute]\ndevice = 3", {}, {}, "wanted text"),
        ("[compute.device]\nx = 3", {}, {}, "wanted text"),
        ("[kernels]\nlinear = ['a']", {}, {}, "kernels.linear has the wrong type"),
        (None, {"OXPLOW_COMPUTE_THREADS": "0"}, {}, "got 0; wanted a whole number of 1 or more"),
        (None, {"OXPLOW_COMPUTE_THREADS": "+-3"}, {}, "wanted a whole number"),
        (None, {"OXPLOW_COMPUTE_DETERMINISTIC": "maybe"}, {}, "(at env OXPLOW_COMPUTE_DETERMIN"),
        (None, {}, {"compute.activation_dtype": "fp16"}, "one of float32, bfloat16, float16"),
        (None, {}, {"compute.device": "a b"}, "wanted a torch device"),
        (None, {}, {"cache.block_size_tokens": 6}, "wanted a multiple of 4"),
        (None, {}, {"cache.max_model_len_tokens": 1}, "wanted 2 or more"),
        (None, {}, {"log.level": "loud"}, "one of debug, info, warning, error"),
        (None, {}, {"log.file": " "}, "wanted a path"),
        (None, {}, {"trace.capacity_events": -1}, "wanted 0 to"),
        (None, {}, {"kernels.linear": " "}, "wanted the name of a kernel"),
    ],
)
def test_wrong_setting_is_refused_with_its_origin(
    text: str | None,
    env: dict[str, str],
    overrides: dict[str, object],
    said: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, env, overrides, folder=tmp_path)
    message = str(caught.value)
    assert said in message
    assert "(at " in message


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_unreadable_file_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.toml"):
        load_config(path, environ={})


@given(st.integers(-(2**70), 2**70))
def test_whole_number_reads_the_same_from_text_and_from_a_value(number: int) -> None:
    def outcome(raw: object) -> object:
        try:
            return load(overrides={"trace.capacity_events": raw}).runtime.trace
        except ConfigError as error:
            return str(error)

    assert outcome(str(number)) == outcome(number)


@settings(max_examples=40)  # each one is compared with every known name
@given(st.text(max_size=30))
def test_any_text_as_a_key_is_taken_or_refused_never_dropped(key: str) -> None:
    try:
        loaded = load(overrides={key: "torch"})
    except ConfigError:
        return
    assert origin(loaded, key) == "--set"


FACTS = Facts(physical_cores=4, devices=("cuda:0", "cuda:1"), model_max_len_tokens=1000)


def test_resolve_leaves_nothing_open() -> None:
    decided = resolve(RuntimeConfig(), FACTS)
    assert all(getattr(decided, f.name) is not None for f in dataclasses.fields(decided))
    assert (decided.device, decided.activation_dtype, decided.threads) == ("cuda:0", "bfloat16", 4)
    assert decided.max_model_len_tokens == 1000


def test_resolve_without_accelerator_takes_cpu_in_float32() -> None:
    decided = resolve(RuntimeConfig(), Facts(physical_cores=2, model_max_len_tokens=8))
    assert (decided.device, decided.activation_dtype) == ("cpu", "float32")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_device_that_answers_is_kept(device: str) -> None:
    assert resolve(RuntimeConfig(compute=ComputeConfig(device=device)), FACTS).device == device


@pytest.mark.parametrize("device", ["npu", "cuda:7", "cpu:3"])
def test_device_that_does_not_answer_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="cuda:0, cuda:1, cpu"):
        resolve(RuntimeConfig(compute=ComputeConfig(device=device)), FACTS)


def test_length_beyond_the_model_is_refused() -> None:
    config = RuntimeConfig(cache=CacheConfig(max_model_len_tokens=1001))
    with pytest.raises(ConfigError, match="at most 1000"):
        resolve(config, FACTS)


def test_length_must_come_from_somewhere() -> None:
    with pytest.raises(ConfigError, match="the model states none"):
        resolve(RuntimeConfig(), Facts(physical_cores=1))


@pytest.mark.parametrize(
    ("env", "threads", "told"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3, "env OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "4,2"}, 4, "env OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "many"}, None, "default"),
        ({"OMP_NUM_THREADS": "0"}, None, "default"),
        ({"OMP_NUM_THREADS": "3", "OXPLOW_COMPUTE_THREADS": "2"}, 2, "env OXPLOW_COMPUTE_THREADS"),
    ],
)
def test_omp_num_threads_counts_where_nothing_closer_does(
    env: dict[str, str], threads: int | None, told: str
) -> None:
    loaded = load(env=env)
    assert loaded.runtime.compute.threads == threads
    assert origin(loaded, "compute.threads") == told
