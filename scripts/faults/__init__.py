"""What `scripts.chaos` and `scripts.soak` share: a mixed load, strict readers of answers, processes seen from outside."""
