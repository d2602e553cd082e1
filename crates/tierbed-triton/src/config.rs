//! Configuration of a model: what `config.pbtxt` says, as Triton hands it over in JSON, and what is
//! completed of it.

use serde_json::{json, Map, Value};
use tierbed_core::{Error, Result};
use tierbed_serve::ServedTensor;
use tierbed_server::{Options, Setting};

/// Parameters that are taken: options of `tierbed-server` with underscores, and `follow`.
const TAKEN: [&str; 22] = [
    "snapshot",
    "follow",
    "local",
    "poll",
    "sync_bandwidth",
    "swap_share",
    "dram_budget",
    "backend",
    "io_engine",
    "cache",
    "resident",
    "neighbours",
    "misses",
    "refresh",
    "record",
    "record_sample",
    "record_max",
    "indices_max",
    "bags_max",
    "answer_max",
    "buffer_max",
    "log_level",
];

/// Ways of Triton to bring requests together, of which a model has one.
const SCHEDULERS: [&str; 3] = ["dynamic_batching", "sequence_batching", "ensemble_scheduling"];

/// The configuration of a model.
#[derive(Debug)]
pub(crate) struct Config {
    told: Map<String, Value>,
    settings: Vec<Setting>,
}

impl Config {
    /// Reads the JSON of Triton.
    ///
    /// # Errors
    /// `Invalid` for parameters that are not taken, or do not go together.
    pub(crate) fn parse(json: &[u8]) -> Result<Self> {
        let told: Map<String, Value> = serde_json::from_slice(json).map_err(|cause| {
            Error::invalid("the configuration of the model is no JSON").with("cause", cause)
        })?;
        let mut settings = Vec::new();
        let parameters = told.get("parameters").and_then(Value::as_object);
        for (name, value) in parameters.into_iter().flatten() {
            if !TAKEN.contains(&name.as_str()) {
                return Err(Error::invalid("the backend has no such parameter")
                    .with("parameter", name)
                    .with("expected", TAKEN.join(", "))
                    .with("remedy", "leave it out of config.pbtxt: Triton listens and limits"));
            }
            let Some(value) = value.get("string_value").and_then(Value::as_str) else {
                return Err(Error::invalid("a parameter of the model has no text")
                    .with("parameter", name)
                    .with("remedy", "give it a string_value in config.pbtxt"));
            };
            settings.push(Setting { name: name.replace('_', "-"), value: value.to_owned() });
        }
        let config = Self { told, settings };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<()> {
        let has = |name| self.setting(name).is_some();
        if has("snapshot") && has("follow") {
            return Err(Error::invalid("a model has a snapshot or follows a channel")
                .with("remedy", "give one of the parameters snapshot and follow"));
        }
        if has("follow") != has("local") {
            return Err(Error::invalid("a channel is followed into a folder of this machine")
                .with("remedy", "give follow: LOCATION@CHANNEL and local: FOLDER together"));
        }
        Ok(())
    }

    fn setting(&self, name: &str) -> Option<&str> {
        let found = self.settings.iter().find(|setting| setting.name == name);
        found.map(|setting| setting.value.as_str())
    }

    /// Returns where rows come from; nothing where the folder of the model's version has them.
    pub(crate) fn place(&self) -> Option<&str> {
        self.setting("follow").or_else(|| self.setting("snapshot"))
    }

    /// Returns the options of a server that the parameters set.
    ///
    /// # Errors
    /// `Invalid` for values that do not fit.
    pub(crate) fn options(&self) -> Result<Options> {
        let is_option = |setting: &&Setting| !matches!(&*setting.name, "follow" | "snapshot");
        let settings: Vec<_> = self.settings.iter().filter(is_option).cloned().collect();
        Options::of_settings(&settings)
    }

    /// Whether Triton joins requests: all tensors have the samples first then, and each input as
    /// many.
    pub(crate) fn is_batched(&self) -> bool {
        let size = self.told.get("max_batch_size").and_then(Value::as_i64);
        size.is_some_and(|size| size > 0)
    }

    /// Returns the configuration with what it leaves out: tensors, and batches where it has a size
    /// of them. `None` when it is complete.
    pub(crate) fn completed(
        &self,
        inputs: &[ServedTensor],
        outputs: &[ServedTensor],
    ) -> Option<Value> {
        let mut completed = self.told.clone();
        let is_batched = self.is_batched();
        // Forms of bags have lengths of their own: only one id each can be joined.
        let inputs: Vec<_> =
            inputs.iter().take(if is_batched { 1 } else { inputs.len() }).collect();
        let inputs = inputs.iter().map(|tensor| {
            let Shown { name, data_type, dims } = shown(tensor, is_batched);
            // Each form is enough.
            json!({ "name": name, "data_type": data_type, "dims": dims, "optional": !is_batched })
        });
        let outputs = outputs.iter().map(|tensor| {
            let Shown { name, data_type, dims } = shown(tensor, is_batched);
            json!({ "name": name, "data_type": data_type, "dims": dims })
        });
        for (key, tensors) in
            [("input", inputs.collect::<Vec<_>>()), ("output", outputs.collect::<Vec<_>>())]
        {
            let given = self.told.get(key).and_then(Value::as_array);
            if given.is_none_or(Vec::is_empty) {
                completed.insert(key.to_owned(), tensors.into());
            }
        }
        let is_scheduled = SCHEDULERS.iter().any(|name| self.told.contains_key(*name));
        if is_batched && !is_scheduled {
            completed.insert("dynamic_batching".to_owned(), json!({}));
        }
        (completed != self.told).then_some(Value::Object(completed))
    }
}

/// A tensor as a configuration has it.
struct Shown<'a> {
    name: &'a str,
    data_type: String,
    dims: &'a [i64],
}

fn shown(tensor: &ServedTensor, is_batched: bool) -> Shown<'_> {
    // Triton puts the samples first itself where it joins requests.
    let dims = match tensor.shape.split_first() {
        Some((_, own)) if is_batched => own,
        _ => &tensor.shape,
    };
    Shown { name: &tensor.name, data_type: format!("TYPE_{}", tensor.datatype), dims }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(rest: Value) -> Result<Config> {
        let mut whole = json!({ "name": "ads", "max_batch_size": 0, "input": [], "output": [] });
        for (key, value) in rest.as_object().unwrap() {
            whole[key] = value.clone();
        }
        Config::parse(whole.to_string().as_bytes())
    }

    fn parameters(named: &[[&str; 2]]) -> Value {
        let values = named.iter();
        let values = values.map(|[name, value]| (*name, json!({ "string_value": value })));
        let values = values.map(|(name, value)| (name.to_owned(), value));
        json!({ "parameters": values.collect::<serde_json::Map<_, _>>() })
    }

    fn tensors() -> [ServedTensor; 3] {
        let tensor = |name: &str, shape: &[i64]| ServedTensor {
            name: name.into(),
            datatype: "INT64",
            shape: shape.to_vec(),
            is_optional: false,
        };
        [tensor("ids", &[-1, 2]), tensor("values", &[-1]), tensor("lengths", &[-1])]
    }

    #[test]
    fn parameters_are_the_options_of_a_server() {
        let given = [["snapshot", "/data/ads"], ["dram_budget", "64MiB"], ["log_level", "warn"]];
        let config = config(parameters(&given)).unwrap();
        let options = config.options().unwrap();
        assert_eq!((config.place(), options.reading.dram_budget.0), (Some("/data/ads"), 64 << 20));
        assert_eq!(options.serving.log_level, "warn");
        let follow = [["follow", "s3://m/ads@stable"], ["local", "/l"], ["poll", "500ms"]];
        let config = super::tests::config(parameters(&follow)).unwrap();
        let options = config.options().unwrap();
        assert_eq!((config.place(), options.versions.poll), (Some("s3://m/ads@stable"), 0.5));
        assert!(super::tests::config(json!({})).unwrap().place().is_none());
    }

    #[test]
    fn wrong_parameters_are_refused_until_they_are_right() {
        for (given, expected) in [
            (&[["address", "a:1"]][..], "leave it out of config.pbtxt"),
            (&[["snapshot", "a"], ["follow", "b"], ["local", "c"]], "give one of the parameters"),
            (&[["follow", "b"]], "and local: FOLDER together"),
            (&[["local", "c"]], "and local: FOLDER together"),
        ] {
            let told = config(parameters(given)).unwrap_err().to_string();
            assert!(told.contains(expected), "{told}");
        }
        let told = config(json!({ "parameters": { "snapshot": {} } })).unwrap_err().to_string();
        assert!(told.contains("string_value"), "{told}");
        for right in [&[["snapshot", "a"]][..], &[["follow", "b"], ["local", "c"]], &[]] {
            config(parameters(right)).unwrap();
        }
        let told = config(parameters(&[["dram_budget", "much"]])).unwrap().options().unwrap_err();
        assert!(told.to_string().contains("write a size"), "{told}");
    }

    #[test]
    fn what_is_left_out_is_completed_and_what_is_given_stays() {
        let tensors = tensors();
        let whole = config(json!({})).unwrap().completed(&tensors, &tensors[..1]).unwrap();
        let all: Vec<_> = whole["input"].as_array().unwrap().iter().map(|t| &t["name"]).collect();
        assert_eq!(all, ["ids", "values", "lengths"]);
        assert_eq!(
            (&whole["input"][0]["optional"], &whole["input"][0]["dims"]),
            (&json!(true), &json!([-1, 2]))
        );
        assert!(whole.get("dynamic_batching").is_none());
        let batched = config(json!({ "max_batch_size": 8 })).unwrap();
        let whole = batched.completed(&tensors, &tensors[..1]).unwrap();
        let ids =
            json!([{ "name": "ids", "data_type": "TYPE_INT64", "dims": [2], "optional": false }]);
        assert_eq!((&whole["input"], &whole["dynamic_batching"]), (&ids, &json!({})));
        let told = config(json!({ "input": [1], "output": [2] })).unwrap();
        assert_eq!(told.completed(&tensors, &tensors), None);
    }
}
