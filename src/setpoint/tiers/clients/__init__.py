"""One module for each storage system that ``remote_store`` can use. Each imports its library when
a client is made, so a server needs only the library of the storage that it uses."""
