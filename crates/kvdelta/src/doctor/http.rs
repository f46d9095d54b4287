// SPDX-License-Identifier: Apache-2.0

//! HTTP, with short patience.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use reqwest::blocking::{Client, RequestBuilder};

use super::limit;

const TIMEOUT: Duration = Duration::from_secs(5);
/// How much of an error page is shown.
const SHOWN_CHARACTERS: usize = 200;
/// Servers that are asked at the same time.
const AT_ONCE: usize = 16;

/// A client that takes no proxy from the environment: metrics are near.
pub(crate) fn client() -> Result<Client> {
    Client::builder()
        .timeout(TIMEOUT)
        .no_proxy()
        .build()
        .context("cannot set up HTTP")
}

/// The text at `url`.
///
/// # Errors
/// In few words, without the URL: who asks names it.
pub(crate) fn text(client: &Client, url: &str) -> Result<String> {
    if url.starts_with("https:") {
        bail!("https is not spoken here; give an http address, for example of a port-forward");
    }
    answer(client.get(url))
}

/// The text that a request is answered with.
pub(crate) fn answer(request: RequestBuilder) -> Result<String> {
    let response = request.send().map_err(|error| root(error.into()))?;
    let status = response.status();
    let body = limit::read(response)
        .map_err(root)
        .context("the answer cannot be read")?;
    let text = String::from_utf8_lossy(&body);
    if !status.is_success() {
        let beginning: String = text.trim().chars().take(SHOWN_CHARACTERS).collect();
        bail!("the answer is {status} {beginning}");
    }
    Ok(text.into_owned())
}

/// The last cause alone: those above it repeat the URL.
fn root(error: anyhow::Error) -> anyhow::Error {
    anyhow!("{}", error.root_cause())
}

/// The texts at `urls`, in their order.
pub(crate) fn texts(client: &Client, urls: &[String]) -> Vec<Result<String>> {
    let mut texts = Vec::with_capacity(urls.len());
    for urls in urls.chunks(AT_ONCE) {
        texts.extend(std::thread::scope(|scope| {
            let readers: Vec<_> = urls
                .iter()
                .map(|url| scope.spawn(|| text(client, url)))
                .collect();
            readers
                .into_iter()
                .map(|reader| match reader.join() {
                    Ok(text) => text,
                    Err(_) => Err(anyhow!("a reader of metrics ended early")),
                })
                .collect::<Vec<_>>()
        }));
    }
    texts
}

/// `url` with `/metrics` unless it names a path already.
pub(crate) fn metrics_url(url: &str) -> String {
    let base = url.trim_end_matches('/');
    let base = if base.contains("://") {
        base.to_owned()
    } else {
        format!("http://{base}")
    };
    match base.split_once("://") {
        Some((_, rest)) if rest.contains('/') => base,
        _ => format!("{base}/metrics"),
    }
}

/// `url` without user and password, to be shown.
///
/// A password that is not escaped may hold a slash, so all before the last `@` goes.
pub(crate) fn shown(url: &str) -> String {
    let (scheme, rest) = match url.split_once("://") {
        Some((scheme, rest)) if scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()) => {
            (format!("{scheme}://"), rest)
        }
        _ => (String::new(), url),
    };
    let server = rest.rsplit_once('@').map_or(rest, |(_, server)| server);
    format!("{scheme}{server}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_not_shown() {
        for (given, expected) in [
            ("http://user:secret@a:1/x", "http://a:1/x"),
            ("user:secret@a:1", "a:1"),
            ("http://user:se/cr@et@a", "http://a"),
            ("user:s://ecret@a", "a"),
            ("user@x:s://ecret@a", "a"),
            ("http://a:1/x", "http://a:1/x"),
            ("a:1", "a:1"),
        ] {
            assert_eq!(shown(given), expected);
        }
    }

    #[test]
    fn a_base_gets_its_path() {
        for (given, expected) in [
            ("http://a:1", "http://a:1/metrics"),
            ("http://a:1/", "http://a:1/metrics"),
            ("a:1", "http://a:1/metrics"),
            ("http://a:1/x/metrics", "http://a:1/x/metrics"),
        ] {
            assert_eq!(metrics_url(given), expected);
        }
    }

    #[test]
    fn https_is_refused_in_words() {
        let error = text(&client().unwrap(), "https://127.0.0.1:1/metrics").unwrap_err();
        assert!(error.to_string().contains("https is not spoken"), "{error}");
    }
}
