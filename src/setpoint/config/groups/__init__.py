"""The options of a server and its engine in groups, each in a file of its own."""
