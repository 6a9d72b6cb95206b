"""The screen: what it knows (view.py), what it shows (panels/), how it is painted and driven (app.py)."""
