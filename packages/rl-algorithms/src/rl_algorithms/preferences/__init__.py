"""What preference learning is made of: answers, pairs and labels as rows, and the losses of a pair."""
