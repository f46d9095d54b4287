//! How a prefill worker says that it cut its offer.

use serde_json::Value;

/// The one key under which a connector of kvdelta says anything in `kv_transfer_params`.
pub const OFFER_KEY: &str = "kvdelta";

/// The claim that an offer was cut for; `None`: the offer is whole, and fits any decode worker.
///
/// `params` is what a prefill worker answered as `disaggregated_params`, with the engine's
/// `kv_transfer_params` in it or being it. An offer of ours that names no claim counts as cut for the
/// empty one, so that nobody takes it for a whole one.
pub fn cut_for(params: &Value) -> Option<&str> {
    let transfer = params.get("kv_transfer_params").unwrap_or(params);
    let offer = transfer.get(OFFER_KEY)?;
    if offer.is_null() {
        return None;
    }
    Some(offer.get("claim_id").and_then(Value::as_str).unwrap_or(""))
}
