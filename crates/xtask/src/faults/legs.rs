// SPDX-License-Identifier: Apache-2.0

//! The two legs of a request over HTTP, as a router sends them.

use std::time::Duration;

use anyhow::Result;
use eventsource_stream::Eventsource;
use futures_util::StreamExt;
use kvdelta_indexer::EngineHash;
use kvdelta_protocol::{OFFER_KEY, cut_for};
use serde::Deserialize;
use serde_json::{Value, json};
use thiserror::Error;

use crate::fleet::MODEL;
use crate::workload;

/// A leg that takes longer hangs; generous, since the machine may be busy.
const LEG_TIMEOUT: Duration = Duration::from_secs(150);

/// Why a leg brought no answer.
#[derive(Debug, Error)]
pub(crate) enum LegError {
    /// The engine says so.
    #[error("status {status}: {body}")]
    Status { status: u16, body: String },
    /// The answer ended in an error.
    #[error("the stream ended in an error: {0}")]
    Stream(String),
    /// The engine is not there, or the connection broke.
    #[error("connection: {0}")]
    Connection(String),
    /// It hangs.
    #[error("no end after {} s", LEG_TIMEOUT.as_secs())]
    TimedOut,
    /// The answer makes no sense.
    #[error("not an answer: {0}")]
    Answer(String),
}

impl LegError {
    /// Whether the engine, alive, ended the request as one that failed.
    pub(crate) const fn is_engines(&self) -> bool {
        matches!(self, Self::Status { status: 500, .. } | Self::Stream(_))
    }

    fn of(error: &reqwest::Error) -> Self {
        if error.is_timeout() {
            return Self::TimedOut;
        }
        let mut text = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(inner) = source {
            text = format!("{text}: {inner}");
            source = inner.source();
        }
        Self::Connection(text)
    }
}

/// A request as both legs have it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask<'a> {
    /// Part of the engine's own request id.
    pub(crate) id: &'a str,
    pub(crate) prompt: &'a [u32],
    pub(crate) salt: Option<&'a str>,
    pub(crate) output_tokens: usize,
}

/// What prefill answers.
#[derive(Clone, Debug)]
pub(crate) struct Prefilled {
    pub(crate) token: u32,
    pub(crate) params: Value,
}

impl Prefilled {
    /// The claim that its offer was cut for.
    pub(crate) fn cut_for(&self) -> Option<&str> {
        cut_for(&self.params)
    }

    /// Prefill's own id of the request, to be freed.
    pub(crate) fn request_id(&self) -> Option<&str> {
        let inner = self.params.pointer("/kvdelta/params");
        let params = inner.unwrap_or(&self.params);
        params.get("remote_request_id")?.as_str()
    }
}

/// What decode answers.
#[derive(Clone, Debug)]
pub(crate) struct Decoded {
    pub(crate) tokens: Vec<u32>,
    /// What stands under `stale_claim`, where one was.
    pub(crate) stale: Option<Value>,
}

#[derive(Deserialize)]
struct Completion {
    choices: Vec<Choice>,
    kv_transfer_params: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
}

/// Sends legs.
#[derive(Clone, Debug)]
pub(crate) struct Legs {
    http: reqwest::Client,
}

impl Legs {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            http: reqwest::Client::builder()
                .timeout(LEG_TIMEOUT)
                // An engine that was killed leaves connections behind that look alive.
                .pool_max_idle_per_host(0)
                .no_proxy()
                .build()?,
        })
    }

    /// The prefill leg, as Dynamo's worker sends it, with what the router adds.
    pub(crate) async fn prefill(
        &self,
        base: &str,
        ask: Ask<'_>,
        claim: Option<&Value>,
        release: Option<&str>,
    ) -> Result<Prefilled, LegError> {
        let mut params = json!({
            "do_remote_decode": true,
            "do_remote_prefill": false,
            "remote_engine_id": null,
            "remote_block_ids": null,
            "remote_host": null,
            "remote_port": null,
        });
        if let Some(claim) = claim {
            params["decode_cache_info"] = claim.clone();
        }
        if let Some(release) = release {
            params[OFFER_KEY] = json!({ "release": release });
        }
        let one = Ask {
            output_tokens: 1,
            ..ask
        };
        let completion = self.whole(base, one, Some(params)).await?;
        let tokens = tokens(&completion)?;
        let (&[token], Some(params)) = (tokens.as_slice(), completion.kv_transfer_params) else {
            return Err(LegError::Answer(format!(
                "prefill answered {tokens:?} without kv_transfer_params or not one token"
            )));
        };
        Ok(Prefilled { token, params })
    }

    /// The decode leg.
    pub(crate) async fn decode(
        &self,
        base: &str,
        ask: Ask<'_>,
        params: Value,
    ) -> Result<Decoded, LegError> {
        let completion = self.whole(base, ask, Some(params)).await?;
        let tokens = tokens(&completion)?;
        let params = completion.kv_transfer_params;
        let stale = params.and_then(|params| params.pointer("/kvdelta/stale_claim").cloned());
        Ok(Decoded { tokens, stale })
    }

    /// The decode leg as a stream of which at most `most` parts are read; then the client is gone.
    pub(crate) async fn stream(
        &self,
        base: &str,
        ask: Ask<'_>,
        params: Value,
        most: usize,
    ) -> Result<Vec<u32>, LegError> {
        let mut body = body(ask, Some(params));
        body["stream"] = json!(true);
        let response = self.post(base, ask, &body).await?;
        let mut events = response.bytes_stream().eventsource();
        let mut text = String::new();
        let mut parts = 0;
        while parts < most {
            let event = match events.next().await {
                Some(Ok(event)) => event,
                Some(Err(error)) => return Err(LegError::Connection(error.to_string())),
                None => return Err(LegError::Connection("it ended without [DONE]".to_owned())),
            };
            if event.data == "[DONE]" {
                break;
            }
            let value: Value = serde_json::from_str(&event.data)
                .map_err(|error| LegError::Answer(format!("{error}: {}", event.data)))?;
            if value.get("error").is_some() {
                return Err(LegError::Stream(event.data));
            }
            if let Some(part) = value.pointer("/choices/0/text").and_then(Value::as_str) {
                text.push_str(part);
                parts += 1;
            }
        }
        let tokens = workload::tokens(&text).map_err(LegError::Answer)?;
        // A stream may end like one that is done where the engine failed the request.
        let wanted = ask.output_tokens;
        if tokens.is_empty() || (most == usize::MAX && tokens.len() != wanted) {
            let found = tokens.len();
            return Err(LegError::Stream(format!("{found} of {wanted} tokens")));
        }
        Ok(tokens)
    }

    /// A request to one engine alone.
    pub(crate) async fn alone(
        &self,
        base: &str,
        ask: Ask<'_>,
        params: Option<Value>,
    ) -> Result<(), LegError> {
        self.whole(base, ask, params).await.map(drop)
    }

    /// Takes blocks out of the prefix cache of an engine with the hooks, by their hashes.
    pub(crate) async fn evict(
        &self,
        base: &str,
        id: &str,
        hashes: &[EngineHash],
    ) -> Result<(), LegError> {
        let one = Ask {
            id,
            prompt: &[4],
            salt: None,
            output_tokens: 1,
        };
        let params = json!({ "fault_evict": hashes });
        self.alone(base, one, Some(params)).await?;
        // The events go out with the next step.
        self.alone(base, one, None).await
    }

    async fn whole(
        &self,
        base: &str,
        ask: Ask<'_>,
        params: Option<Value>,
    ) -> Result<Completion, LegError> {
        let response = self.post(base, ask, &body(ask, params)).await?;
        let text = response
            .text()
            .await
            .map_err(|error| LegError::of(&error))?;
        serde_json::from_str(&text).map_err(|error| LegError::Answer(format!("{error}: {text}")))
    }

    async fn post(
        &self,
        base: &str,
        ask: Ask<'_>,
        body: &Value,
    ) -> Result<reqwest::Response, LegError> {
        let response = self
            .http
            .post(format!("{base}/v1/completions"))
            .header("X-Request-Id", ask.id)
            .json(body)
            .send()
            .await
            .map_err(|error| LegError::of(&error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status().as_u16();
        let body = response.text().await.unwrap_or_default();
        Err(LegError::Status { status, body })
    }
}

fn body(ask: Ask<'_>, params: Option<Value>) -> Value {
    let mut body = json!({
        "model": MODEL,
        "prompt": ask.prompt,
        "temperature": 0,
        "max_tokens": ask.output_tokens,
        "ignore_eos": true,
    });
    if let Some(salt) = ask.salt {
        // As Dynamo's worker hands it on; an index cannot tell other salts from other extra keys.
        body["cache_salt"] = json!(format!("dynamo-cache-salt:{salt}"));
    }
    if let Some(params) = params {
        body["kv_transfer_params"] = params;
    }
    body
}

fn tokens(completion: &Completion) -> Result<Vec<u32>, LegError> {
    let choice = completion.choices.first();
    let text = choice.and_then(|choice| choice.text.as_deref());
    workload::tokens(text.unwrap_or_default()).map_err(LegError::Answer)
}
