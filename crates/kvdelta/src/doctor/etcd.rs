// SPDX-License-Identifier: Apache-2.0

//! Dynamo's etcd back end of discovery, by etcd's own JSON gateway (etcd 3.4 and newer).
//!
//! Keys are `BUCKET/KEY`, values the same records as in files (`src/storage/kv/etcd.rs` of
//! `dynamo-runtime`). A lease removes the keys of a worker that is gone.

use anyhow::{Context, Result, bail};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use reqwest::blocking::{Client, RequestBuilder};
use serde::Deserialize;
use serde_json::json;

use super::discovery::{BUCKETS, Entry};
use super::http;

/// User and password, as Dynamo takes them from `ETCD_AUTH_USERNAME` and `ETCD_AUTH_PASSWORD`.
// No Debug: it would show the password.
pub(crate) struct Login {
    pub(crate) name: String,
    pub(crate) password: String,
}

#[derive(Debug, Deserialize)]
struct Range {
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

#[derive(Debug, Deserialize)]
struct KeyValue {
    key: String,
    /// Left out when empty.
    #[serde(default)]
    value: String,
}

#[derive(Debug, Deserialize)]
struct Token {
    token: String,
}

/// Reads the records from the first of `endpoints` that answers.
///
/// # Errors
/// None answers, or one answers what etcd would not.
pub(crate) fn read(
    client: &Client,
    endpoints: &[String],
    login: Option<&Login>,
) -> Result<Vec<Entry>> {
    let mut reasons = Vec::new();
    for endpoint in endpoints {
        match read_one(client, endpoint, login) {
            Ok(entries) => return Ok(entries),
            Err(error) => reasons.push(format!("{error:#}")),
        }
    }
    bail!("{}", reasons.join("; "))
}

fn read_one(client: &Client, endpoint: &str, login: Option<&Login>) -> Result<Vec<Entry>> {
    let base = endpoint.trim().trim_end_matches('/');
    let base = if base.contains("://") {
        base.to_owned()
    } else {
        format!("http://{base}")
    };
    if base.starts_with("https:") {
        bail!(
            "{}: etcd over TLS is not spoken here; give an http address",
            http::shown(&base)
        );
    }
    let token = match login {
        Some(login) => {
            let body = json!({ "name": login.name, "password": login.password });
            let url = format!("{base}/v3/auth/authenticate");
            let token: Token = answer(client.post(&url).json(&body), &url)?;
            Some(token.token)
        }
        None => None,
    };
    let mut entries = Vec::new();
    for bucket in BUCKETS {
        let url = format!("{base}/v3/kv/range");
        let body = json!({
            "key": STANDARD.encode(format!("{bucket}/")),
            // The end of a prefix is the prefix with its last byte raised: '0' follows '/'.
            "range_end": STANDARD.encode(format!("{bucket}0")),
        });
        let mut request = client.post(&url).json(&body);
        if let Some(token) = &token {
            request = request.header("Authorization", token);
        }
        let range: Range = answer(request, &url)?;
        for pair in range.kvs {
            let decode = |text: &str| {
                STANDARD.decode(text).with_context(|| {
                    format!(
                        "{} answers {text:?}, which is not base64",
                        http::shown(&url)
                    )
                })
            };
            entries.push(Entry {
                key: String::from_utf8_lossy(&decode(&pair.key)?).into_owned(),
                value: decode(&pair.value)?,
                age_seconds: None,
            });
        }
    }
    Ok(entries)
}

fn answer<T: for<'de> Deserialize<'de>>(request: RequestBuilder, url: &str) -> Result<T> {
    let url = http::shown(url);
    let text = http::answer(request).with_context(|| format!("cannot read {url}"))?;
    serde_json::from_str(&text).with_context(|| format!("{url} does not answer as etcd does"))
}
