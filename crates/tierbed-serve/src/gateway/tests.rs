//! Tests through sockets.
