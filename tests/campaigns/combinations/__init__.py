"""Random combinations of settings, options, shapes and models in TRL: what is accepted must run, and be right."""
