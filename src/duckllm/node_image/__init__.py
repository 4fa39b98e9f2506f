"""A bootable image whose single job is the worker: how it is built, what runs in it, how it is handed out."""
