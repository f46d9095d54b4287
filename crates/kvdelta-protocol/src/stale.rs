//! What a decode worker answers where its claim did not hold, and how its offer is taken back.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::decode_cache_info::VERSION;
use crate::offer::OFFER_KEY;

/// Key of a [`StaleReport`] under [`OFFER_KEY`] in a decode worker's `kv_transfer_params`.
pub const STALE_CLAIM_KEY: &str = "stale_claim";

/// Key under [`OFFER_KEY`] of the id of a claim that held, in what a prefill worker answers that heard from the
/// decode worker itself what that one holds, as SGLang's does.
pub const HELD_CLAIM_KEY: &str = "held_claim";

/// Key under [`OFFER_KEY`] in a prefill request's `kv_transfer_params`: the `remote_request_id` of an earlier
/// offer of the same prefill worker, which nobody will fetch any more.
///
/// Only the router writes it, when it asks that worker again; what a client sends there must not get through.
pub const RELEASE_KEY: &str = "release";

/// A decode worker's word that it did not rely on what prefill skipped or offered, or a prefill worker's that the
/// decode worker holds less than the claim says.
///
/// The router lowers its trust in the rank that it asked, and asks prefill again without a claim where
/// [`Recovered::AskAgain`] says so. Unknown fields are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StaleReport {
    /// [`VERSION`].
    pub version: u32,
    /// The claim; empty where the offer was whole, or the worker was not told of a claim.
    pub claim_id: String,
    /// Blocks that prefill skipped by the claim.
    pub said_blocks: u32,
    /// How many of them the worker had.
    pub had_blocks: u32,
    /// What was wrong.
    pub reason: StaleReason,
    /// What became of the request.
    pub recovered: Recovered,
}

/// What was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StaleReason {
    /// The worker had fewer blocks than the claim says.
    Stale,
    /// It had as many, of other content.
    Content,
    /// Prefill's lease had ended before all was read.
    Expired,
    /// What prefill offered could not be loaded; the engine did not say why.
    LoadFailed,
    /// One that this reader does not know.
    #[serde(other)]
    Unknown,
}

impl StaleReason {
    /// The label of the metric.
    pub const fn as_label(self) -> &'static str {
        match self {
            Self::Stale => "stale",
            Self::Content => "content",
            Self::Expired => "expired",
            Self::LoadFailed => "load_failed",
            Self::Unknown => "unknown",
        }
    }
}

/// What became of a request whose claim was stale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Recovered {
    /// The worker computes what is missing; nothing is left to do.
    Recompute,
    /// Prefill sent what is missing; nothing is left to do.
    Sent,
    /// The request ended before its first token, to be prefilled once more without a claim.
    AskAgain,
    /// It ended, and must not be repeated.
    Failed,
    /// One that this reader does not know.
    #[serde(other)]
    Unknown,
}

impl Recovered {
    /// The label of the metric.
    pub const fn as_label(self) -> &'static str {
        match self {
            Self::Recompute => "recompute",
            Self::Sent => "sent",
            Self::AskAgain => "ask_again",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// The report in what a decode worker answered; `None`: there is none, it cannot be read, or it is of another
/// version.
///
/// `answer` is `kv_transfer_params`, or what holds it under that name, as a response's engine data does.
pub fn stale_report(answer: &Value) -> Option<StaleReport> {
    let report = ours(answer)?.get(STALE_CLAIM_KEY)?;
    StaleReport::deserialize(report)
        .ok()
        .filter(|report| report.version == VERSION)
}

/// The id of the claim that held, in what a prefill worker answered; see [`HELD_CLAIM_KEY`].
///
/// `answer` as for [`stale_report`].
pub fn held_claim(answer: &Value) -> Option<&str> {
    ours(answer)?.get(HELD_CLAIM_KEY)?.as_str()
}

/// The `remote_request_id` by which the prefill worker knows a cut offer, for [`RELEASE_KEY`].
///
/// `params` as for [`cut_for`](crate::cut_for). `None`: the offer is whole, or names no request.
pub fn remote_request_id(params: &Value) -> Option<&str> {
    let id = ours(params)?.get("params")?.get("remote_request_id")?;
    id.as_str().filter(|id| !id.is_empty())
}

/// What stands under [`OFFER_KEY`] in `kv_transfer_params`, or in those that `value` holds.
fn ours(value: &Value) -> Option<&Value> {
    let transfer = value.get("kv_transfer_params").unwrap_or(value);
    transfer.get(OFFER_KEY)
}
