"""tui3090: a terminal dashboard that runs a fine-tune. A train.py needs one name of it: `Recipe`."""

from tui3090.recipe import Recipe

__all__ = ["Recipe"]
