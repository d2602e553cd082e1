//! Who asks from outside? HTTP lookups and predictions over a snapshot.
