"""Reports: everything known about a machine and a model, collected from the state folder, as HTML or Markdown."""
