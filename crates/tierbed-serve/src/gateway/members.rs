//! Members: which servers answer for each shard, from a file or from DNS.
//!
//! ```toml
//! [[shard]]
//! replicas = ["10.0.0.1:8001", "10.0.0.2:8001"]
//! ```
//!
//! The same as JSON: `{"shard": [{"replicas": ["10.0.0.1:8001"]}]}`. `dns:rows-{shard}:8001` asks
//! for the addresses of a name per shard.

use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use tierbed_core::{Error, Result};

use crate::stamp::{read_small, Stamp};

/// What names a shard's number in a name of DNS.
const SHARD: &str = "{shard}";

/// Where members are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    File(PathBuf),
    /// Name and port, with the number of the shard in it.
    Dns(String),
}

/// The addresses of each shard's servers, `host:port`, by shard.
pub(super) type Addresses = Vec<Vec<String>>;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    shard: Vec<Shard>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shard {
    replicas: Vec<String>,
}

impl Source {
    /// Reads `FILE` or `dns:NAME:PORT`.
    ///
    /// # Errors
    /// `Invalid` for a name without a port, or without the shard's number.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let Some(name) = text.strip_prefix("dns:") else { return Ok(Self::File(text.into())) };
        let port = name.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
        if !matches!(port, Some(Ok(_))) || !name.contains(SHARD) {
            return Err(Error::invalid("members by DNS need a name with the shard, and a port")
                .with("found", text)
                .with("expected", "dns:rows-{shard}.example.org:8001"));
        }
        Ok(Self::Dns(name.to_owned()))
    }

    /// Returns the state of the file; `None` where DNS is to be asked.
    pub(super) fn stamp(&self) -> Option<Stamp> {
        match self {
            Self::File(path) => Stamp::of(path),
            Self::Dns(_) => None,
        }
    }

    /// Returns the addresses of `shard_count` shards. Names are looked up, which may take long.
    ///
    /// # Errors
    /// `Invalid` for a file that cannot be read or names another number of shards. A name that
    /// cannot be looked up is a shard without servers.
    pub(super) fn read(&self, shard_count: u32) -> Result<Addresses> {
        match self {
            Self::File(path) => {
                let addresses = parse(&read_small(path, "members")?)
                    .map_err(|error| error.with("path", path.display()))?;
                check(&addresses, shard_count, path)?;
                Ok(addresses)
            }
            Self::Dns(name) => Ok((0..shard_count).map(|shard| resolve(name, shard)).collect()),
        }
    }
}

fn parse(bytes: &[u8]) -> Result<Addresses> {
    let wrong = |cause: &dyn std::fmt::Display| {
        Error::invalid("the file of members is not the expected TOML or JSON")
            .with("expected", r#"[[shard]] replicas = ["host:port"]"#)
            .with("cause", cause)
    };
    let is_json = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    let file: File = if is_json {
        serde_json::from_slice(bytes).map_err(|cause| wrong(&cause))?
    } else {
        let text = std::str::from_utf8(bytes).map_err(|cause| wrong(&cause))?;
        toml::from_str(text).map_err(|cause| wrong(&cause))?
    };
    Ok(file.shard.into_iter().map(|shard| shard.replicas).collect())
}

fn check(addresses: &Addresses, shard_count: u32, path: &Path) -> Result<()> {
    if addresses.len() != shard_count as usize {
        return Err(Error::invalid("members are of another number of shards")
            .with("path", path.display())
            .with("found", addresses.len())
            .with("shards", shard_count)
            .with("remedy", "write one [[shard]] for each shard, in order"));
    }
    let bad = addresses.iter().flatten().find(|address| {
        let port = address.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>()));
        !matches!(port, Some((host, Ok(_))) if !host.is_empty() && !host.contains('/'))
    });
    match bad {
        Some(address) => Err(Error::invalid("a member's address must be host:port")
            .with("path", path.display())
            .with("found", address)
            .with("remedy", "give the address that its server has by grpc-address")),
        None => Ok(()),
    }
}

fn resolve(name: &str, shard: u32) -> Vec<String> {
    let name = name.replace(SHARD, &shard.to_string());
    // A shard whose name is unknown has no servers now; who asks for it is told so.
    let mut found: Vec<_> =
        name.to_socket_addrs().into_iter().flatten().map(|address| address.to_string()).collect();
    found.sort();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_read_as_toml_and_json() {
        let toml = b"[[shard]]\nreplicas = [\"a:1\", \"b:2\"]\n[[shard]]\nreplicas = []\n";
        let json = br#" {"shard": [{"replicas": ["a:1", "b:2"]}, {"replicas": []}]}"#;
        let expected = vec![vec!["a:1".to_owned(), "b:2".to_owned()], Vec::new()];
        assert_eq!(parse(toml).unwrap(), expected);
        assert_eq!(parse(json).unwrap(), expected);
        for bad in ["[[shard]]\nreplica = []", "{", "{\"shard\": [[]]}", "\u{ff}"] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn addresses_that_are_none_and_missing_shards_are_refused() {
        let check = |addresses: &[&str], shard_count| {
            let addresses = addresses.iter().map(|address| vec![(*address).to_owned()]).collect();
            check(&addresses, shard_count, Path::new("members.toml"))
        };
        assert!(check(&["a:1", "[::1]:2"], 2).is_ok());
        assert!(check(&["a:1"], 2).unwrap_err().to_string().contains("shards: 2"));
        for bad in ["a", "a:", ":1", "http://a:1", "a:70000"] {
            assert!(check(&[bad], 1).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_have_the_number_of_the_shard() {
        assert_eq!(Source::parse("m.toml").unwrap(), Source::File("m.toml".into()));
        let source = Source::parse("dns:rows-{shard}.invalid:8001").unwrap();
        assert_eq!(source.read(2).unwrap(), [Vec::<String>::new(), Vec::new()]);
        for bad in ["dns:rows:8001", "dns:rows-{shard}", "dns:rows-{shard}:port"] {
            assert!(Source::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(resolve("127.0.0.{shard}:80", 7), ["127.0.0.7:80"]);
    }
}
