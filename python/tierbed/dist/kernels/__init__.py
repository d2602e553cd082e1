"""What runs on GPUs: Triton kernels, one source for the interpreter, the compiler and the device.

Triton is not a dependency; import the modules of this package only where it is installed.
"""
