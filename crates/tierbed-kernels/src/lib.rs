//! Here are bytes, give me numbers: pooling, gradients, optimizers, initial values.
