"""What the plugin knows of models: families and the structures that no mode handles, as data."""
