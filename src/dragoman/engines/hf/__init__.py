"""What Hugging Face's files say of a model: vocabulary, control tokens, chat templates."""
