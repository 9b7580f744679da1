"""What the model router is trained on and measured with: held-out questions, and what became of them with each decoder."""
