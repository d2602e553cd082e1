//! How fast, how big, how often? Binaries that measure the engine without Python.
