"""Is what the server says about its media true?  Golden sets, scores with bounds, a judge for open answers, reports, a gate.

It talks HTTP to any OpenAI-compatible server and knows no engine, no scheduler and no torch.
"""
