"""A machine and a model on one page: collected from the state folder, rendered as HTML or Markdown."""
