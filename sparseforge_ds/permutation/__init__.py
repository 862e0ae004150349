"""Which channels of a model can change places without changing what it computes, and the order that suits a pattern.

channel_table  which tensors write and read each dimension, by family
layouts        how a dimension lies in a tensor: plain, by heads, fused, by experts
channels       the dimensions of one model, made of the table
search         the order in which N of every M keep the most score
find           the orders of a whole model, by the scores of the weights that read each dimension
activations    the same by Wanda's score, from a few sequences
record         the orders as they are saved, and a tensor put into them
apply          a model in memory put into them
"""
