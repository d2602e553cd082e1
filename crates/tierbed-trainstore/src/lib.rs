//! Rows changed; where do they live? Read-write row stores and their checkpoints.
