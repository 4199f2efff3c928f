"""One file per topology; the catalog finds them by their `TOPOLOGY`."""
