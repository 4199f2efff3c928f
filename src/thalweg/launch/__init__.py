"""Starting worker processes and the store, on this machine or in a lab, and supervising them."""
