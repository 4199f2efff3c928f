"""Running rounds on a transport: the communication thread, and the relay of a coded tree."""
