//! Python glue and nothing else.
