"""The families, each in its own file or beside those that write as it does; a file ends with `DIALECTS`."""
