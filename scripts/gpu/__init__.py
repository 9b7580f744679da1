"""What `scripts.gpu_check` measures, one file each: parity, speed of steps and towers, a blend of requests."""
