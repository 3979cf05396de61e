"""SmolLM2-135M-Instruct, a real pretrained model of 30 layers that the package index has."""
