"""A local page about one network: class and certificate of an image, and an attack on it."""
