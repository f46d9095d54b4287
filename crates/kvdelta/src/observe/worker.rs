// SPDX-License-Identifier: Apache-2.0

//! The option `--worker`: an engine's name and where it publishes.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use anyhow::{Result as AnyResult, bail};
use kvdelta_indexer::Dialect;
use kvdelta_indexer::feed::zmq::endpoint_of_rank;

/// Ranks of one engine, at most: beyond it a typing error is likelier than an engine.
const MOST_RANKS: u32 = 1024;

/// An engine that is named on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Worker {
    pub(crate) name: String,
    /// Publisher of rank 0; those of the others are at the ports after it.
    pub(crate) endpoint: String,
    pub(crate) replay: Option<String>,
    pub(crate) ranks: u32,
    pub(crate) dialect: Dialect,
}

impl FromStr for Worker {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, rest) = text
            .split_once('=')
            .filter(|(name, _)| !name.trim().is_empty())
            .ok_or("it is NAME=tcp://host:port, then options with commas")?;
        let mut parts = rest.split(',');
        let mut worker = Self {
            name: name.trim().to_owned(),
            endpoint: parts.next().unwrap_or_default().to_owned(),
            replay: None,
            ranks: 1,
            dialect: Dialect::Vllm,
        };
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            match (key, value) {
                ("replay", endpoint) => worker.replay = Some(endpoint.to_owned()),
                ("ranks", count) => {
                    let count = count.parse().ok();
                    worker.ranks = count
                        .filter(|ranks| (1..=MOST_RANKS).contains(ranks))
                        .ok_or_else(|| format!("{part:?}: 1 to {MOST_RANKS} ranks"))?;
                }
                ("engine", "vllm") => worker.dialect = Dialect::Vllm,
                ("engine", "sglang") => worker.dialect = Dialect::Sglang,
                _ => {
                    return Err(format!(
                        "{part:?} is none of replay=tcp://host:port, ranks=N, engine=vllm|sglang"
                    ));
                }
            }
        }
        for endpoint in [Some(&worker.endpoint), worker.replay.as_ref()] {
            let Some(endpoint) = endpoint else { continue };
            endpoint_of_rank(endpoint, worker.ranks - 1).map_err(|error| error.to_string())?;
        }
        Ok(worker)
    }
}

/// Refuses workers that are the same one twice: its blocks would all count as held twice.
///
/// # Errors
/// Two have the same name, or the same endpoint for one of their ranks.
pub(crate) fn check_distinct(workers: &[Worker]) -> AnyResult<()> {
    let mut names = BTreeSet::new();
    let mut endpoints = BTreeMap::new();
    for worker in workers {
        let name = &worker.name;
        if !names.insert(name) {
            bail!("two workers are called {name:?}");
        }
        for first in [Some(&worker.endpoint), worker.replay.as_ref()] {
            let Some(first) = first else { continue };
            for rank in 0..worker.ranks {
                let endpoint = endpoint_of_rank(first, rank)?;
                match endpoints.get(&endpoint) {
                    Some(other) if *other != name => {
                        bail!("{other:?} and {name:?} have the same endpoint {endpoint}");
                    }
                    _ => endpoints.insert(endpoint, name),
                };
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_a_name_an_endpoint_and_options() {
        let plain: Worker = "d0=tcp://10.0.0.1:5557".parse().unwrap();
        let expected = Worker {
            name: "d0".to_owned(),
            endpoint: "tcp://10.0.0.1:5557".to_owned(),
            replay: None,
            ranks: 1,
            dialect: Dialect::Vllm,
        };
        assert_eq!(plain, expected);
        let text = "d0=tcp://10.0.0.1:5557,replay=tcp://10.0.0.1:6557,ranks=2,engine=sglang";
        let expected = Worker {
            replay: Some("tcp://10.0.0.1:6557".to_owned()),
            ranks: 2,
            dialect: Dialect::Sglang,
            ..expected
        };
        assert_eq!(text.parse(), Ok(expected));
    }

    #[test]
    fn the_same_engine_twice_is_refused() {
        let check = |options: &[&str]| {
            let workers = options.iter().map(|option| option.parse().unwrap());
            let checked = check_distinct(&workers.collect::<Vec<_>>());
            checked.map_err(|error| error.to_string())
        };
        let (a, b) = ("a=tcp://h:5557,replay=tcp://h:6557", "b=tcp://h:5559");
        assert_eq!(check(&[a, b]), Ok(()));
        for (second, reason) in [
            ("a=tcp://h:1", "two workers are called \"a\""),
            (
                "b=tcp://h:5557",
                "\"a\" and \"b\" have the same endpoint tcp://h:5557",
            ),
            (
                "b=tcp://h:5555,ranks=3",
                "\"a\" and \"b\" have the same endpoint tcp://h:5557",
            ),
            (
                "b=tcp://h:1,replay=tcp://h:6557",
                "\"a\" and \"b\" have the same endpoint tcp://h:6557",
            ),
        ] {
            assert_eq!(check(&[a, second]), Err(reason.to_owned()));
        }
    }

    #[test]
    fn what_nothing_can_connect_to_is_refused_with_its_reason() {
        for (text, reason) in [
            ("tcp://10.0.0.1:5557", "NAME=tcp://host:port"),
            ("=tcp://10.0.0.1:5557", "NAME=tcp://host:port"),
            ("d0=", "is not tcp://host:port"),
            ("d0=ipc:///tmp/a", "is not tcp://host:port"),
            ("d0=tcp://*:5557", "needs its host"),
            ("d0=tcp://a:5557,replay=tcp://*:1", "needs its host"),
            ("d0=tcp://a:65535,ranks=2", "no port for rank 1"),
            ("d0=tcp://a:5557,ranks=0", "1 to 1024 ranks"),
            ("d0=tcp://a:5557,engine=trtllm", "engine=vllm|sglang"),
            ("d0=tcp://a:5557,", "is none of"),
        ] {
            let error = text.parse::<Worker>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
