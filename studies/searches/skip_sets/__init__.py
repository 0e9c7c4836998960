"""Published searches for sublayers to skip, one file each, run as one study on equal terms. Registered in `methods`."""
