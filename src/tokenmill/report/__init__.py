"""What is known of a machine and a model, as one page: gathered from the state folder, drawn without a network."""
