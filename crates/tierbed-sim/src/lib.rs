//! What if the disk lies? A seeded faulty disk for tests.
