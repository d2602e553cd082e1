//! What does the model eat? Log readers, vocabularies and a seeded generator.
