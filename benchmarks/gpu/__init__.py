"""A model of 8B parameters on one GPU, served with and without admission: see `__main__`."""
