"""torch: quantising codecs, in which replicas send each other gradients and differences of weights.

The algorithm is that of SDP4Bit (Jia et al., arXiv 2410.15526).
"""
