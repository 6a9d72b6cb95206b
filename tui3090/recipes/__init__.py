"""The train.py files that come with tui3090, to run and to start from."""
