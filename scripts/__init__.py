"""Tools of the repository. A package, because verl installs one of the same name, which would hide these."""
