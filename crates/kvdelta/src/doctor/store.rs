// SPDX-License-Identifier: Apache-2.0

//! Which store discovery is in.

use std::env;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Result, bail};
use reqwest::blocking::Client;

use super::discovery::Entry;
use super::{etcd, files, http};

/// Any address but an empty one; the rest shows when it is read.
pub(crate) fn address(text: &str) -> Result<String, String> {
    match text.trim() {
        "" => Err("an address is empty".to_owned()),
        _ => Ok(text.to_owned()),
    }
}

/// Where discovery is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Store {
    Files(PathBuf),
    Etcd(Vec<String>),
    /// One that cannot be read from outside.
    Other(String),
}

impl Store {
    /// By options, else by the variables that Dynamo reads, with its defaults.
    pub(crate) fn choose(
        file_kv: Option<&Path>,
        etcd: &[String],
        variable: impl Fn(&str) -> Option<String>,
    ) -> Self {
        if let Some(folder) = file_kv {
            return Self::Files(folder.to_owned());
        }
        if !etcd.is_empty() {
            return Self::Etcd(etcd.to_vec());
        }
        match variable("DYN_DISCOVERY_BACKEND").as_deref() {
            Some("file") => Self::Files(
                variable("DYN_FILE_KV")
                    .map_or_else(|| env::temp_dir().join("dynamo_store_kv"), PathBuf::from),
            ),
            None | Some("etcd") => {
                let endpoints = variable("ETCD_ENDPOINTS")
                    .unwrap_or_else(|| "http://localhost:2379".to_owned());
                Self::Etcd(endpoints.split(',').map(str::to_owned).collect())
            }
            Some(other) => Self::Other(other.to_owned()),
        }
    }

    /// How reports name it.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Files(folder) => format!("files {}", folder.display()),
            Self::Etcd(endpoints) => {
                let shown: Vec<String> = endpoints.iter().map(|url| http::shown(url)).collect();
                format!("etcd {}", shown.join(","))
            }
            Self::Other(backend) => format!("back end {backend}"),
        }
    }

    /// Reads its records.
    ///
    /// # Errors
    /// It cannot be read.
    pub(crate) fn read(&self, client: &Client) -> Result<Vec<Entry>> {
        match self {
            Self::Files(folder) => files::read(folder, SystemTime::now()),
            Self::Etcd(endpoints) => {
                let login = env::var("ETCD_AUTH_USERNAME")
                    .ok()
                    .zip(env::var("ETCD_AUTH_PASSWORD").ok())
                    .map(|(name, password)| etcd::Login { name, password });
                etcd::read(client, endpoints, login.as_ref())
            }
            Self::Other(backend) => {
                bail!("DYN_DISCOVERY_BACKEND={backend} cannot be read here, only file and etcd")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `options` are `--file-kv` and `--etcd`.
    fn store((file_kv, urls): (Option<&str>, &[&str]), variables: &[(&str, &str)]) -> Store {
        let urls: Vec<String> = urls.iter().map(|url| (*url).to_owned()).collect();
        Store::choose(file_kv.map(Path::new), &urls, |name| {
            let found = variables.iter().find(|(known, _)| *known == name)?;
            Some(found.1.to_owned())
        })
    }

    #[test]
    fn discovery_is_where_dynamo_would_look() {
        let etcd = |urls: &[&str]| Store::Etcd(urls.iter().map(|url| (*url).to_owned()).collect());
        type Options<'a> = (Option<&'a str>, &'a [&'a str]);
        type Case<'a> = (Options<'a>, &'a [(&'a str, &'a str)], Store);
        let cases: &[Case<'_>] = &[
            ((None, &[]), &[], etcd(&["http://localhost:2379"])),
            (
                (None, &[]),
                &[("ETCD_ENDPOINTS", "http://a:1,http://b:2")],
                etcd(&["http://a:1", "http://b:2"]),
            ),
            // Dynamo's back end is etcd though the folder is set.
            (
                (None, &[]),
                &[("DYN_FILE_KV", "/kv")],
                etcd(&["http://localhost:2379"]),
            ),
            (
                (None, &[]),
                &[("DYN_DISCOVERY_BACKEND", "file"), ("DYN_FILE_KV", "/kv")],
                Store::Files("/kv".into()),
            ),
            (
                (Some("/mine"), &[]),
                &[("DYN_DISCOVERY_BACKEND", "etcd")],
                Store::Files("/mine".into()),
            ),
            (
                (None, &["a:1", "b:2"]),
                &[("DYN_DISCOVERY_BACKEND", "file")],
                etcd(&["a:1", "b:2"]),
            ),
            (
                (None, &[]),
                &[("DYN_DISCOVERY_BACKEND", "mem")],
                Store::Other("mem".to_owned()),
            ),
        ];
        for (options, variables, expected) in cases {
            assert_eq!(
                store(*options, variables),
                *expected,
                "{options:?} {variables:?}"
            );
        }
    }
}
