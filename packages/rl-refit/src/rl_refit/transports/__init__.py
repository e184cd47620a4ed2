"""The ways of bytes from source ranks to sink ranks, one file each, all behind `Transport`."""
