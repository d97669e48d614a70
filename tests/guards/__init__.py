"""Guards of the house: rules over the source, run on the package and on planted violations."""
