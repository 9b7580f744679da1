"""What a box carries, and what it costs, by formulas alone.  Pure: no clock, no loop, no device; a plan takes a second.

    workload      what requests carry: lengths, media, repeats, how they bunch
    replica_load  one decoder under load: rows, step times, time per token, first tokens
    box           eight cards cut up: who goes where, what is carried, what is refused
    fleet         all ways to cut a box up, the best of them, how many boxes a rate takes
    costs         GPU time and dollars by modality
    sheet         all of that as plain figures
    refit         efficiencies of this machine, from a result of `mmserve bench` or `scripts.gpu_check`

How a step's time comes about stands in `roofline.timing`.  Three more things are needed, and each is a known formula:

- **Rows** by Little's law: requests a second x tokens of an answer x time per token.  The time per token depends on the rows, so both are
  solved for together.  Steps are of two kinds: those that only decode, and those that prefill beside it, as long as the scheduler lets
  them be.  How often the second kind comes follows from how many tokens there are to prefill.
- **Waiting** for the first token: Sakasegawa's approximation for G/G/m ("An approximation formula Lq = alpha rho^beta / (1 - rho)", 1977),
  with the squared coefficients of variation of arrivals and of prefills.
- **Bursts**: the p99 figures are those at the load that is exceeded 1 % of the time, whose spread is the peakedness of the arrivals
  (Whitt, "Heavy-traffic approximations for service systems with blocking", 1984).

Knows nothing of single requests: `scripts.simulate` plays those, and `scripts.compare_plan` prints both side by side.
"""
