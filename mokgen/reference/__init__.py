"""What a layer must compute: inputs, the fp64 oracle, the torch baseline and how errors are judged."""
