"""One file a panel, named as on screen; each a pure function from the view to rows of text."""
