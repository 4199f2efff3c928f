"""The straggler study of CodedReduce (its Figure 2): codes beside uncoded baselines."""
