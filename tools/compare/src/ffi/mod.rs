//! Where does this crate leave safe Rust? Only here: mapped memory, and RocksDB's C interface.

pub(crate) mod map;
pub(crate) mod rocksdb;
