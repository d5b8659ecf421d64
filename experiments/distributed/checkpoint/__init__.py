"""Does a training that is killed while it saves go on from its last checkpoint? See README.md."""
