"""SGLang: servers that run already or are launched here, as one engine. `engine.SGLangEngine` is what recipes name."""
